"""Where the numbers of a trends page come from: monitor files, data bases and dumps."""
