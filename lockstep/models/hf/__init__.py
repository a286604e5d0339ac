"""Reading and writing Hugging Face model folders: configuration and tensors."""
