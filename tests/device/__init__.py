"""What is measured with an accelerator: that it runs without one, reads what it finds rightly, and ends clean."""
