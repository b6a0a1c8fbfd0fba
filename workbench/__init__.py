"""Programs' parts for a person: searches, reports, exported networks. A cluster needs none of them."""
