"""Model definitions. The only package that uses Flax Linen; outside it parameters are plain nested dicts."""
