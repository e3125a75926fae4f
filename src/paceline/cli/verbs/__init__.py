"""One module a verb, imported when the verb is called. No verb imports another."""
