"""What notebooks and other programs call: submit jobs and look at them."""
