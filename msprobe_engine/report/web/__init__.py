"""The front-end kit: every html page of the product is one file in one frame, with one look, that needs no network."""
