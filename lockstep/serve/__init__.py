"""An HTTP server over the engine: chat, completions, and tokens in, tokens out. Needs the extra `serve`."""
