"""Advice sent to runs over their connection: pressure, co-tenants, GPU faults."""
