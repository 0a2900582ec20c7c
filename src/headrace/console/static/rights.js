// What the user may do, as `whoami` says it. The broker decides; this only hides what it would refuse.

let me = { name: "nobody", administrator: false, grants: [] };
let grants = [];

export function setMe(found) {
  me = found;
  grants = found.grants.map((text) => {
    const [rights, topics, names = ">"] = text.split(":");
    return { rights: rights.split(","), topics: topics.split(","), names: names.split(",") };
  });
}

export const whoAmI = () => me;

/** Whether a name or pattern of topics stands for a topic, too. */
export function covers(pattern, name) {
  if (name.startsWith("__")) return pattern === name;
  const wanted = pattern.split(".");
  const words = name.split(".");
  for (let place = 0; place < wanted.length; place++) {
    if (place >= words.length) return false;
    if (wanted[place] === ">" && place === wanted.length - 1) return true;
    if (words[place] === ">" || (wanted[place] !== "*" && wanted[place] !== words[place])) return false;
  }
  return wanted.length === words.length;
}

/** Whether the right is there over a subscription, which means over its name and each of its topics. */
export function mayUse(right, stats) {
  const topics = new Set(stats.partitions.map((each) => each.topic));
  return [...(topics.size ? topics : [stats.topic])].every((topic) => may(right, topic, stats.name));
}

/** Whether a grant gives the right over the topic and the name; null: over any. */
export function may(right, topic = null, name = null) {
  if (me.administrator) return true;
  return grants.some((grant) =>
    (grant.rights.includes(right) || grant.rights.includes("admin")) &&
    (topic === null || grant.topics.some((pattern) => covers(pattern, topic))) &&
    (name === null || grant.names.some((pattern) => covers(pattern, name))));
}
