"""Template contexts and files that several families share."""
