"""What people ask a leader for about running ranks: stacks and profiles."""
