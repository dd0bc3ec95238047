"""Task processes: calls of tasks in processes of their own."""
