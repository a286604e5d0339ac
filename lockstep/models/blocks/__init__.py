"""The building blocks of a decoder's layers."""
