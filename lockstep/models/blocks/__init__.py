"""What a decoder's layers are made of."""
