"""Communication: groups, collectives, amax agreement. This package knows no format names and no GEMMs."""
