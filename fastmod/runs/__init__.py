"""What every study shares: settings, trials, the engine that runs and resumes them, and what a run leaves behind."""
