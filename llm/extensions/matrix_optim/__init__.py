"""Muon, NorMuon, SOAP, and Hyperball; one rank owns each sharded matrix."""
