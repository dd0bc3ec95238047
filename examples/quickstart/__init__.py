"""Package that tells type checkers this `tasks` from the one in email_sender; otherwise empty."""
