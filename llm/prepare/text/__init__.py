"""Files, folders and Hub data sets as documents, with a reader for each format."""
