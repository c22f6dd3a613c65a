package core

// StateNames lists the states of each half.
func StateNames() map[string][]string {
	out := map[string][]string{}
	for s := claimResolving; s <= claimVoid; s++ {
		out["claim"] = append(out["claim"], s.String())
	}
	for s := loadResolving; s <= loadEnding; s++ {
		out["load"] = append(out["load"], s.String())
	}
	for s := offerEarly; s <= offerRefused; s++ {
		out["offer"] = append(out["offer"], s.String())
	}
	return out
}
