"""A store as rows with one conditional step: what features that are written once stand on."""
