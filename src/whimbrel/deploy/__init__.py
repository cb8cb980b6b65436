"""The three roles as processes of their own, and the one that starts and watches them all."""
