"""Stand-ins for values of a module that is traced: what is known of them, and what is recorded."""
