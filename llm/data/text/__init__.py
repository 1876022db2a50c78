"""Files, folders and Hub data sets as documents."""
