"""Several machines that train one model: how they meet, what is checked before they start, who starts the processes."""
