"""Events of the driver: XIDs, operational events, and GPUs bound to the driver or unbound."""
