"""Plan, simulate and run decentralized SGD on any network within a communication budget."""
