"""An HTTP server over the engine: chat, completions, and tokens in and out. Needs the extra `serve`."""
