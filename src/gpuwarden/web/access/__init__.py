"""Access to the HTTP server: TLS, certificates of clients, and logins."""
