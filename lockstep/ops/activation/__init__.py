"""The gated product: SiLU, GELU or clamped SwiGLU."""
