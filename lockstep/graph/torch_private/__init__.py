"""Every private interface of torch that the graph toolkit uses. No other file of the toolkit touches one."""
