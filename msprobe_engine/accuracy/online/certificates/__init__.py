"""TLS between trainings and a benchmark host: the authority, its certificates, and what is said of them."""
