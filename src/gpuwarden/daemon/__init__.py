"""The daemon: wiring, poll loop, control socket, systemd."""
