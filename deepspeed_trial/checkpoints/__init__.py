"""What a run saves and goes on from: whole or not there, checked before use, loaded without running code."""
