"""What text becomes for a model, and what its tokens say: its tokenizer, chat template and form of tool calls."""
