"""Explanation of an error text: its problems, the first cause before its consequences, and the evidence."""
