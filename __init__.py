"""Train drafters for speculative decoding and measure what they buy."""

__version__ = "0.1.0"
