"""Training with the path attached against DeepSpeed's own code, on many versions of DeepSpeed."""
