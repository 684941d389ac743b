"""Audio on its way out: encoded once and ahead of time, paced on a monotonic clock."""
