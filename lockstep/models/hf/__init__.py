"""The folder of Hugging Face's layout: its configuration, its tensors, read and written."""
