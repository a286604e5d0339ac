"""Does this machine keep the contract?"""
