"""The check of a device: is everything right on this machine, and what does it cost? See docs/guide/doctor.md."""
