"""Empty. It tells type checkers this `tasks` from the one in email_sender; nothing else needs it."""
