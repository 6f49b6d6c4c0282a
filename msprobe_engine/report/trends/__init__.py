"""How the numbers of a run went: everything the trends page shows, from monitor files, dumps of several steps and trend data bases."""
