"""Checks of the driver, the GPUs, their memory and the machine around them."""
