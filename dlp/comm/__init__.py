"""Communication: groups, collectives, amax agreements. This package does not use formats or GEMMs."""
