"""Pre-trains Post-LN encoders, from raw text to a benchmarked model."""

__version__ = "0.1.0"
