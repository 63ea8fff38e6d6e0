"""What runs inside the sandbox to answer SQL requests; sent there as text, see `entry`."""
