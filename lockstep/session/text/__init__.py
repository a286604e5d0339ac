"""Text to tokens and back for a model: its tokenizer, chat template and format of tool calls."""
