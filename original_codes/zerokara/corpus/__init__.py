"""Files → documents: finding the files, reading their formats, putting bad lines aside, the embedded corpus."""
