"""Tools for a user at a machine: searches, reports, exported networks. A cluster does not need them."""
