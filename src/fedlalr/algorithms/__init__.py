"""The methods, one file each: pure functions on named slots."""
