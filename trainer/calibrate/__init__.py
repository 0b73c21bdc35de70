"""What the devices and links of this job reach: one program on all ranks (`ndctl calibrate`)."""
