"""The hardware side: ask the driver, name what it answers, freeze it in a snapshot."""
