"""What people on call hear of a real job."""
